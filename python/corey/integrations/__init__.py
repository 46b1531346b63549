"""The package inside others."""
