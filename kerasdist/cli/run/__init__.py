"""`kerasdist run`: starts a job's processes, watches them, and says how they ended."""
