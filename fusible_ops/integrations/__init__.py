"""Ways into other libraries, each loaded when it is asked for: `fusible_ops.integrations.transformer_engine`."""
