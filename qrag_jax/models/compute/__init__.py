"""Building blocks of trunks: packing, attention, rotations, linear maps, adapters, dropout."""
