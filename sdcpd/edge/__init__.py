"""Floor 5: SDCP's resources over HTTP: dispatch, typed peer client, transports, the operator's socket."""
