"""flash_ext behind the interfaces of others. Nothing is activated by an import."""
