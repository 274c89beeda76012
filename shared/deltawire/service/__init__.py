"""What all services do alike: settings, auth, app, logging, metrics, serving."""
