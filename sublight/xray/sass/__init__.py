"""What a kernel issues, from its machine code: instructions, their lines, loops, kinds and clocks."""
