"""The weight table: rows, transforms, layouts, and plans for loading and export."""
