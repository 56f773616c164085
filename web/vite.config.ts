import { defineConfig } from "vite";
import { compress } from "./compress.ts";

/** The page is built into the server's package, with links relative to wherever it is served. */
export default defineConfig({
  base: "./",
  plugins: [compress()],
  build: {
    outDir: process.env.HERMES_WEB_OUT ?? "../src/hermes/server/web",
    emptyOutDir: true,
    target: "es2022",
    assetsInlineLimit: 0,
    modulePreload: { polyfill: false },
    reportCompressedSize: false,
    rolldownOptions: { checks: { pluginTimings: false, bundlerTimings: false } },
  },
});
