"""Words of the core: values, commands, events, replies, effects, refusals."""
