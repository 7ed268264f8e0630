/**
 * A durable subscriber in JavaScript with zeromq.js, written from docs/proxy.md. It prints what it got and what is
 * acknowledged.
 *
 * Arguments: endpoint, name, the id after which it ends.
 */
const { randomInt } = require("node:crypto")
const { setTimeout: sleep } = require("node:timers/promises")
const { Dealer } = require("zeromq")

const MAX_BYTES = 4096
const SILENCE_MS = 3000

/** Sends a request until its answer is there; returns its letter, its JSON object and the frames behind it. */
async function ask(dealer, kind, request) {
  for (;;) {
    await dealer.send([Buffer.from(`ZDS\x02${kind}`), JSON.stringify(request)])
    for (;;) {
      let frames
      try {
        frames = await dealer.receive()
      } catch (error) {
        if (error.code !== "EAGAIN") throw error
        break // silence: the same again
      }
      const [head, json, ...buffers] = frames
      if (head.toString("latin1", 0, 4) !== "ZDS\x02") throw new Error("no message of version 2")
      const letter = head.toString("latin1", 4)
      const answer = JSON.parse(json)
      if ((answer.session ?? request.session) !== request.session) continue
      if (letter === "X") throw new Error(`${answer.code}: ${answer.reason}`)
      if (answer.first === request.first) return { letter, answer, buffers } // OPENED has no first
    }
  }
}

/** The entries of a column. */
function entries(offsets, data) {
  const place = (i) => offsets.readInt32LE(4 * i)
  return Array.from({ length: offsets.length / 4 - 1 }, (_, i) => data.subarray(place(i), place(i + 1)))
}

/** The messages of a BATCH: of each one its id, its topic and its value. */
function messages({ rows = 0, columns }, buffers) {
  if (rows === 0) return []
  const [ids, ...columnBuffers] = buffers
  const all = Array.from({ length: rows }, (_, i) => ({ id: Number(ids.readBigInt64LE(8 * i)), topic: "" }))
  if (columns[0] === "frames") {
    const [places, offsets, data] = columnBuffers
    const frames = entries(offsets, data)
    all.forEach((message, i) => {
      const [begin, end] = [places.readInt32LE(4 * i), places.readInt32LE(4 * (i + 1))]
      if (end - begin > 1) message.topic = frames[begin]
      message.value = frames[end - 1]
    })
  } else {
    const [valid, topicOffsets, topicData, valueOffsets, valueData] = columnBuffers
    const topics = entries(topicOffsets, topicData)
    const values = entries(valueOffsets, valueData)
    all.forEach((message, i) => {
      if (valid.length === 0 || (valid[i >> 3] >> (i & 7)) & 1) message.topic = topics[i]
      message.value = values[i]
    })
  }
  return all
}

async function main(endpoint, name, last) {
  const dealer = new Dealer({ receiveTimeout: SILENCE_MS, linger: 0 })
  dealer.connect(endpoint)
  // 20 random bits and a count of 32 bits: JavaScript's numbers are exact up to 2 ** 53.
  const me = { name, session: randomInt(1, 2 ** 20) * 2 ** 32 + 1 }
  const opened = await ask(dealer, "O", { ...me, start: "earliest" })
  let first = opened.answer.next
  let done = first
  while (done <= last) {
    // The last FETCH asks only whether the position is on the proxy's disk.
    const wanted = first > last ? { max_bytes: 0, confirm: true } : { max_bytes: MAX_BYTES, wait: 1000 }
    const { letter, answer, buffers } = await ask(dealer, "F", { ...me, first, done: first, ...wanted })
    if (letter === "L") console.log(`lost ${first} to ${answer.next - 1}`)
    for (const { id, topic, value } of messages(answer, buffers)) {
      if (id > last) break
      console.log(`got ${id} ${value} ${topic}`)
      await sleep(1) // so that there is a middle to be killed in
    }
    if (answer.done > done) console.log(`acked ${(done = answer.done) - 1}`)
    first = Math.min(answer.next, last + 1)
  }
  dealer.close()
}

const [endpoint, name, last] = process.argv.slice(2)
main(endpoint, name, Number(last))
