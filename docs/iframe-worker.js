// Browsers start no worker from a page that was opened from a disk, and the search of the site needs one. There, a hidden
// frame runs the worker's script instead.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.body.appendChild(Object.assign(document.createElement("iframe"), { hidden: true }));
      this.scope = frame.contentWindow;
      const page = this.scope.document;
      // What a worker has and a frame lacks: importScripts, and messages that go to whoever made it.
      this.scope.importScripts = async (...urls) => {
        for (const url of urls) await this.load(url);
      };
      this.scope.postMessage = (data) => {
        const message = new MessageEvent("message", { data });
        this.dispatchEvent(message);
        this.onmessage?.(message);
      };
      this.load = (url) =>
        new Promise((resolve, reject) => {
          const script = Object.assign(page.createElement("script"), { src: url, onload: resolve, onerror: reject });
          page.body.appendChild(script);
        });
      this.loaded = this.load(url);
    }
    postMessage(data) {
      this.loaded.then(() => this.scope.dispatchEvent(new this.scope.MessageEvent("message", { data })));
    }
    terminate() {}
  };
}
