"""`python -m flash_ext.bench`: attention on your shape, beside other implementations."""
