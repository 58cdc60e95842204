"""agro's objective in other libraries' trainers. Each file needs the library that it is named after."""
