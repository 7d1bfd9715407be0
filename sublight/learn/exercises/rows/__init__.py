"""Chapter 2: rows. A program holds a row, or walks over it, and hands back sums, maxima and what follows of them."""
