"""What a training function imports: devices, `Accelerator` and what it delegates to."""
