"""Documents to data-parallel ranks and micro-batches, so that all take as long."""
