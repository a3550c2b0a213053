// A browser starts no worker from a file: search would not work on a site that is opened without a server.
// There, the worker's script runs in a hidden frame instead.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      const inside = frame.contentWindow
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
      this.started = new Promise((started) => {
        const script = inside.document.createElement("script")
        script.src = url
        script.onload = started
        inside.document.body.append(script)
      })
      this.inside = inside
    }
    async postMessage(data) {
      await this.started
      this.inside.dispatchEvent(new this.inside.MessageEvent("message", { data }))
    }
    terminate() {}
  }
}
