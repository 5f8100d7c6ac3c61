"""One file a policy: from a request and its candidates to a choice with its reasons. No gRPC, no engine, no clock."""
