"""Rules by which a data set is divided among clients."""
