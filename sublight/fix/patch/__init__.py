"""Our ops in anybody's model: recognised by behaviour, set on the instance, verified, measured, undone."""
