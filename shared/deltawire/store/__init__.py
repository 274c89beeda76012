"""Named bytes in a bucket: one seam (base), three media (local, hub, s3), one door (open)."""
