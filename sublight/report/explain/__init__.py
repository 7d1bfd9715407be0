"""What `explain` shows: terminal, HTML, Perfetto."""
