import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.charset.StandardCharsets;
import java.util.Random;
import java.util.regex.Matcher;
import java.util.regex.Pattern;

import org.zeromq.SocketType;
import org.zeromq.ZContext;
import org.zeromq.ZMQ;
import org.zeromq.ZMsg;

/**
 * A durable subscriber in Java with JeroMQ, written from docs/proxy.md. It prints what it got and what is acknowledged.
 *
 * Arguments: endpoint, name (without quotes and backslashes), the id after which it ends. The language is that of
 * Java 7, which Janino compiles.
 */
public class DurableClient {
    private static final int MAX_BYTES = 4096;
    private static final int SILENCE_MS = 3000;

    private final ZContext context = new ZContext();
    private final ZMQ.Socket socket = context.createSocket(SocketType.DEALER);
    private final ZMQ.Poller poller = context.createPoller(1);
    private final long session = (1L + new Random().nextInt(0x7ffffffe)) << 32 | 1;
    private char kind; // of the answer, whose JSON object and other frames are:
    private String header;
    private ZMsg frames;

    public static void main(String[] arguments) throws InterruptedException {
        new DurableClient().run(arguments[0], arguments[1], Long.parseLong(arguments[2]));
    }

    private void run(String endpoint, String name, long last) throws InterruptedException {
        // One connection in a hundred of JeroMQ 0.6.0 never shakes hands; after this it is made again, not after 30 s.
        socket.setHandshakeIvl(SILENCE_MS);
        socket.connect(endpoint);
        poller.register(socket, ZMQ.Poller.POLLIN);
        String me = "{\"name\":\"" + name + "\",\"session\":" + session;
        ask('O', me + ",\"start\":\"earliest\"}", -1);
        long first = number("next", 0);
        long done = first;
        while (done <= last) {
            // What was handled is to be on the disk before more comes: each FETCH has confirm, not only the last one.
            String more = first > last ? ",\"max_bytes\":0" : ",\"max_bytes\":" + MAX_BYTES + ",\"wait\":1000";
            ask('F', me + ",\"first\":" + first + ",\"done\":" + first + more + ",\"confirm\":true}", first);
            if (kind == 'L') {
                System.out.println("lost " + first + " to " + (number("next", 0) - 1));
            } else {
                handle((int) number("rows", 0), last);
            }
            if (number("done", 0) > done) {
                done = number("done", 0);
                System.out.println("acked " + (done - 1));
            }
            first = Math.min(number("next", 0), last + 1);
        }
        context.close();
    }

    /** Sends a request until its answer is there. */
    private void ask(char letter, String request, long first) {
        while (true) {
            ZMsg message = new ZMsg();
            message.add(new byte[] {'Z', 'D', 'S', 2, (byte) letter});
            message.add(request.getBytes(StandardCharsets.UTF_8));
            message.send(socket);
            while (poller.poll(SILENCE_MS) > 0) {
                frames = ZMsg.recvMsg(socket);
                byte[] head = frames.pop().getData();
                if (head.length != 5 || head[0] != 'Z' || head[1] != 'D' || head[2] != 'S' || head[3] != 2) {
                    throw new IllegalStateException("no message of version 2");
                }
                kind = (char) head[4];
                header = frames.popString();
                boolean mine = number("session", session) == session; // or there is none
                if (mine && kind == 'X') {
                    throw new IllegalStateException(header);
                } else if (mine && number("first", -1) == first) { // OPENED has none
                    return;
                }
            }
        }
    }

    private void handle(int rows, long last) throws InterruptedException {
        if (rows == 0) {
            return;
        }
        ByteBuffer ids = buffer();
        boolean whole = header.indexOf("\"columns\":[\"frames\"]") >= 0;
        ByteBuffer places = whole ? buffer() : null; // of the messages, in the frames
        ByteBuffer valid = whole ? null : buffer();
        String[] topics = whole ? null : entries();
        String[] values = entries(); // or all frames
        for (int i = 0; i < rows && ids.getLong(8 * i) <= last; i++) {
            String topic = "";
            int value = i;
            if (whole) {
                int begin = places.getInt(4 * i);
                value = places.getInt(4 * (i + 1)) - 1;
                topic = begin < value ? values[begin] : "";
            } else if (valid.limit() == 0 || (valid.get(i / 8) >> i % 8 & 1) == 1) {
                topic = topics[i];
            }
            System.out.println("got " + ids.getLong(8 * i) + " " + values[value] + " " + topic);
            Thread.sleep(1); // so that there is a middle to be killed in
        }
    }

    /** The entries of a column: its offsets, and its data. */
    private String[] entries() {
        ByteBuffer offsets = buffer();
        byte[] data = frames.pop().getData();
        String[] entries = new String[offsets.limit() / 4 - 1];
        for (int i = 0; i < entries.length; i++) {
            int begin = offsets.getInt(4 * i);
            entries[i] = new String(data, begin, offsets.getInt(4 * (i + 1)) - begin, StandardCharsets.UTF_8);
        }
        return entries;
    }

    private ByteBuffer buffer() {
        return ByteBuffer.wrap(frames.pop().getData()).order(ByteOrder.LITTLE_ENDIAN);
    }

    /** A number of the JSON object, in which there is no other object. */
    private long number(String field, long otherwise) {
        Matcher matcher = Pattern.compile("\"" + field + "\":([0-9]+)").matcher(header);
        return matcher.find() ? Long.parseLong(matcher.group(1)) : otherwise;
    }
}
