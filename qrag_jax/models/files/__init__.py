"""Model folders: safetensors, torch, PEFT and sentence-transformers files."""
