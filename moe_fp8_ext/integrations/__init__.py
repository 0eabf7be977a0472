"""How other packages call this one: each module here is imported by name and needs that package."""
