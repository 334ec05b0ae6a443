"""The quickstart: trains with each packing in turns, records every step, shows what came out."""
