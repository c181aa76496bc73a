"""What trunks are computed with: packing, attention, rotations, adapters, dropout."""
