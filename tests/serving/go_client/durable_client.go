// A durable subscriber in Go with go-zeromq/zmq4, written from docs/durable-protocol.md. It prints what it got and what is
// acknowledged.
//
// Arguments: endpoint, name, the id after which it ends.
package main

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"log"
	"math/rand"
	"os"
	"strconv"
	"time"

	"github.com/go-zeromq/zmq4"
)

const (
	maxBytes = 4096
	silence  = 3 * time.Second
)

type object = map[string]any

type answer struct {
	kind           byte
	buffers        [][]byte
	Session, First *int64 // OPENED has no First
	Next, Done     int64
	Lost           int64
	Rows           int
	Columns        []string
	Code, Reason   string
}

// A client has one connection at a time. go-zeromq sends a random routing id, a new one for each socket, so each
// connection is a socket.
type client struct {
	endpoint string
	socket   zmq4.Socket
	received chan zmq4.Msg // closed when the connection has ended
}

func (c *client) connect() {
	for {
		c.socket = zmq4.NewDealer(context.Background(), zmq4.WithDialerMaxRetries(-1))
		if c.socket.Dial(c.endpoint) == nil {
			break
		}
		c.socket.Close()
		time.Sleep(100 * time.Millisecond)
	}
	socket, received := c.socket, make(chan zmq4.Msg, 100)
	c.received = received
	go func() {
		defer close(received)
		for {
			message, err := socket.Recv()
			if err != nil {
				return
			}
			received <- message
		}
	}()
}

// Sends a request until its answer is there. Its first is -1 if it is an OPEN.
func (c *client) ask(kind byte, session, first int64, request object) answer {
	request["session"] = session
	text, _ := json.Marshal(request)
	for {
		c.socket.SendMulti(zmq4.NewMsgFrom([]byte{'Z', 'D', 'S', 3, kind}, text)) // an error ends the connection
		for silent := time.After(silence); silent != nil; {
			select {
			case message, ok := <-c.received:
				if !ok {
					c.socket.Close()
					c.connect()
					silent = nil
				} else if a := parse(message.Frames); a.isFor(session, first) {
					return a
				}
			case <-silent:
				silent = nil
			}
		}
	}
}

func parse(frames [][]byte) answer {
	if len(frames) < 2 || len(frames[0]) != 5 || string(frames[0][:4]) != "ZDS\x03" {
		log.Fatal("no message of version 3")
	}
	a := answer{kind: frames[0][4], buffers: frames[2:]}
	if err := json.Unmarshal(frames[1], &a); err != nil {
		log.Fatal(err)
	}
	return a
}

func (a *answer) isFor(session, first int64) bool {
	if a.Session != nil && *a.Session != session {
		return false
	}
	if a.kind == 'X' {
		log.Fatal(a.Code, ": ", a.Reason)
	}
	return a.First == nil && first == -1 || a.First != nil && *a.First == first
}

// Entry i of the column whose offsets are in a buffer, and its data in the next one.
func (a *answer) entry(offsets, i int) []byte {
	begin, end := a.place(offsets, i), a.place(offsets, i+1)
	return a.buffers[offsets+1][begin:end]
}

func (a *answer) place(offsets, i int) int {
	return int(binary.LittleEndian.Uint32(a.buffers[offsets][4*i:]))
}

// Message i of a BATCH.
func (a *answer) message(i int) (id int64, topic, value []byte) {
	id = int64(binary.LittleEndian.Uint64(a.buffers[0][8*i:]))
	if a.Columns[0] == "frames" {
		begin, end := a.place(1, i), a.place(1, i+1)
		if end-begin > 1 {
			topic = a.entry(2, begin)
		}
		return id, topic, a.entry(2, end-1)
	}
	if valid := a.buffers[1]; len(valid) == 0 || valid[i/8]>>(i%8)&1 == 1 {
		topic = a.entry(2, i)
	}
	return id, topic, a.entry(4, i)
}

func main() {
	name := os.Args[2]
	last, _ := strconv.ParseInt(os.Args[3], 10, 64)
	c := client{endpoint: os.Args[1]}
	c.connect()
	session := 1 + rand.Int63n(1<<53-1)
	opened := c.ask('O', session, -1, object{"name": name, "start": "earliest"})
	first, done := opened.Next, opened.Next
	for done <= last {
		request := object{"name": name, "first": first, "done": first, "max_bytes": maxBytes}
		if first > last { // all is handled; is it on the server's disk that it is acknowledged?
			request["max_bytes"], request["confirm"] = 0, true
		}
		a := c.ask('F', session, first, request)
		if a.Lost > 0 {
			fmt.Printf("lost %d\n", a.Lost)
		}
		for i := 0; i < a.Rows; i++ {
			id, topic, value := a.message(i)
			if id > last {
				break
			}
			fmt.Printf("got %d %s %s\n", id, value, topic)
			time.Sleep(time.Millisecond) // so that there is a middle to be killed in
		}
		if a.Done > done {
			done = a.Done
			fmt.Printf("acked %d\n", done-1)
		}
		first = min(a.Next, last+1)
	}
	c.socket.Close()
}
