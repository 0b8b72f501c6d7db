"""One module a source format; each turns a raw row into the one chat-shaped `ChatRow` that the importer builds from."""
