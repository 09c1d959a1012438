"""How long steps and their parts take, and what was sent."""
