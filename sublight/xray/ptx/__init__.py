"""What a kernel moves, by following some of its blocks through their PTX."""
