"""Models built outside of a scope, by their own steps, or trained by own loops."""
