"""How many blocks an SM holds, what limits them, and whether that matters."""
