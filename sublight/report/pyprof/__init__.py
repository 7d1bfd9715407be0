"""A Python profile for people: the terminal, a page, and the formats of other viewers."""
