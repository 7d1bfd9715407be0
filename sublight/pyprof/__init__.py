"""Python profilers: where a program's time goes by looking, and every call by tracing."""
