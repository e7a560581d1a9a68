"""The container image of the test cluster: its recipe, and building it when it is missing or old."""
