"""flash_ext under the interfaces of other packages. An import activates nothing."""
