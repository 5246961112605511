"""Every communication goes through here: `door(mesh)` gives the world behind a mesh."""
