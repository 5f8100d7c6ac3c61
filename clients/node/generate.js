// Streams one answer: node generate.js PROMPT [HOST:PORT]
import { readFileSync } from "node:fs";
import { fileURLToPath } from "node:url";
import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";

const [prompt, target = "localhost:50051"] = process.argv.slice(2);
if (!prompt) {
  console.error("usage: node generate.js PROMPT [HOST:PORT]");
  process.exit(2);
}

const definition = protoLoader.loadSync("phaseroute/v1/inference.proto", {
  includeDirs: [fileURLToPath(new URL("../../protos", import.meta.url))],
  keepCase: true,
  longs: Number,
  enums: String,
  oneofs: true,
});
const { InferenceService } = grpc.loadPackageDefinition(definition).phaseroute.v1;

const { PHASEROUTE_TLS_CA: ca, PHASEROUTE_TLS_CERT: cert, PHASEROUTE_TLS_KEY: key, PHASEROUTE_TOKEN: token } = process.env;
const credentials = ca
  ? grpc.credentials.createSsl(...[ca, key, cert].map((path) => (path ? readFileSync(path) : null)))
  : grpc.credentials.createInsecure();
const metadata = new grpc.Metadata();
if (token) {
  metadata.set("authorization", `Bearer ${token}`);
}

const client = new InferenceService(target, credentials, {
  "grpc.max_receive_message_length": 64 * 1024 * 1024,
  "grpc.service_config": JSON.stringify({
    methodConfig: [
      {
        name: [{ service: "phaseroute.v1.InferenceService" }],
        retryPolicy: {
          maxAttempts: 4,
          initialBackoff: "0.1s",
          maxBackoff: "2s",
          backoffMultiplier: 3,
          retryableStatusCodes: ["UNAVAILABLE", "CANCELLED"],
        },
      },
    ],
  }),
});

const request = { prompt: { chat: { messages: [{ role: "user", content: prompt }] } }, max_new_tokens: 128 };
const call = client.Generate(request, metadata);
process.once("SIGINT", () => call.cancel());

call.on("data", ({ event, delta, finished }) => {
  if (event === "delta") {
    process.stdout.write(delta.text);
  } else if (event === "finished") {
    const { usage, routing } = finished;
    const where = routing ? ` on ${routing.backend}` : "";
    console.log(`\n[${usage.generated_tokens} tokens${where}, ${finished.finish_reason}]`);
  }
});
call.on("error", (error) => {
  if (error.code !== grpc.status.CANCELLED) {
    console.error(error.details);
    process.exitCode = 1;
  }
});
call.on("end", () => client.close());
