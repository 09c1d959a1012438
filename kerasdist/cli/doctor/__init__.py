"""`kerasdist doctor`: what is here, what is wrong, and the remedy."""
