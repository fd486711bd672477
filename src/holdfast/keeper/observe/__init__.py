"""What a keeper tells about itself: status, metrics, journal."""
