"""LoRA: what has adapters (table), the adapters themselves, where their values come from (weights) and go (export)."""
