"""Privacy losses: the Gaussian one in closed form, discretised distributions, and dominating pairs."""
