"""The bundled trainers: programs a broker runs on its nodes. They know the environment contract, never the broker."""
