"""The same experiments on a real federation: what a node answers and what the server does there. What talks to Flower is in
`engines/flower`, the only room that imports flwr."""
