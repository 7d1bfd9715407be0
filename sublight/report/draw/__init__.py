"""What reports are drawn with: tables, charts, pages."""
