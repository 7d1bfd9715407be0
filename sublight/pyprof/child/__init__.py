"""First on a child's path: Python runs `sitecustomize` of this folder before the child's own program."""
