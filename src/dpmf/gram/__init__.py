"""The Gram matrix of the mixture means: the matrix itself, its sums and lags without forming it, its bands."""
