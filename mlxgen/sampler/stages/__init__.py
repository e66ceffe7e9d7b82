"""The stages. Every `Stage` with a `name` in a module of this folder is a field of the sampler's config."""
