"""Between the products of a mixture of experts."""
