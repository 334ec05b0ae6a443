"""What a machine reaches, measured: rates of operations and of attention."""
