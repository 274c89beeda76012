"""The same task learned three ways: asynchronously, in step, and by TRL's own trainer."""
