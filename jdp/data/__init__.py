"""Read the rows of a dataset, and place them on the devices in batches."""
