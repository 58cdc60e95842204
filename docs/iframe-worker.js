/* Search from a folder: browsers start no worker from file://, so there its script runs in a hidden frame. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.onmessage = this.onerror = null;
      this.waiting = [];
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const inner = this.frame.contentWindow;
      inner.importScripts = (...urls) => urls.map((each) => this.load(each));
      inner.postMessage = (data) => setTimeout(() => this.deliver(data));
      this.load(url).onload = () => {
        this.ready = true;
        this.waiting.splice(0).forEach((data) => this.pass(data));
      };
    }
    load(url) {
      const inner = this.frame.contentDocument;
      const script = inner.createElement("script");
      script.src = new URL(url, document.baseURI);
      inner.head.append(script);
      return script;
    }
    deliver(data) {
      const event = new MessageEvent("message", { data });
      this.dispatchEvent(event);
      if (this.onmessage) this.onmessage(event);
    }
    pass(data) {
      const inner = this.frame.contentWindow;
      const event = new inner.MessageEvent("message", { data });
      if (inner.onmessage) inner.onmessage(event);
      inner.dispatchEvent(event);
    }
    postMessage(data) {
      if (this.ready) setTimeout(() => this.pass(data));
      else this.waiting.push(data);
    }
    terminate() {
      this.frame.remove();
    }
  };
}
