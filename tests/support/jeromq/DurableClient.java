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
 * A durable subscriber in Java, written from docs/proxy.md. It prints what it got and what is acknowledged.
 *
 * Arguments: endpoint, name, the id after which it ends. The language is that of Java 7, which Janino compiles.
 */
public class DurableClient {
    private static final int MAX_BYTES = 4096;
    private static final int SILENCE_MS = 3000;

    public static void main(String[] arguments) throws InterruptedException {
        String name = arguments[1];
        long last = Long.parseLong(arguments[2]);
        ZContext context = new ZContext();
        ZMQ.Socket socket = context.createSocket(SocketType.DEALER);
        // One connection in a hundred of JeroMQ 0.6.0 never shakes hands; after this it is made again, not after 30 s.
        socket.setHandshakeIvl(SILENCE_MS);
        socket.connect(arguments[0]);
        ZMQ.Poller poller = context.createPoller(1);
        poller.register(socket, ZMQ.Poller.POLLIN);

        long client = 1 + new Random().nextInt(0x7ffffffe);
        long session = client << 32 | 1;
        String me = "\"name\":\"" + name + "\",\"session\":" + session;
        boolean open = false;
        long first = 0;
        long kept = 0;
        while (true) {
            if (!open) {
                send(socket, 'O', "{" + me + ",\"start\":\"earliest\"}");
            } else { // what was handled is to be on the disk before more comes
                send(socket, 'F', "{" + me + ",\"first\":" + first + ",\"done\":" + first + ",\"max_bytes\":"
                        + (first > last ? 0 : MAX_BYTES) + ",\"wait\":" + (first > last ? 0 : 1000)
                        + ",\"confirm\":true}");
            }
            boolean answered = false;
            while (!answered && poller.poll(SILENCE_MS) > 0) { // after silence the same again
                ZMsg message = ZMsg.recvMsg(socket);
                byte[] head = message.pop().getData();
                if (head.length != 5 || head[0] != 'Z' || head[1] != 'D' || head[2] != 'S' || head[3] != 2) {
                    throw new IllegalStateException("no message of version 2");
                }
                String header = message.popString();
                char kind = (char) head[4];
                boolean mine = number(header, "session", session) == session;
                if (kind == 'X' && mine) {
                    throw new IllegalStateException(header);
                } else if (kind == 'R' && mine && !open) {
                    open = true;
                    answered = true;
                    first = number(header, "next", -1);
                    kept = first;
                } else if ((kind == 'B' || kind == 'L') && mine && open && number(header, "first", -1) == first) {
                    answered = true;
                    if (kind == 'L') {
                        say("lost " + first + " to " + (number(header, "next", -1) - 1));
                    } else {
                        handle(header, message, last);
                    }
                    long done = number(header, "done", -1);
                    if (done > kept) {
                        kept = done;
                        say("acked " + (done - 1));
                    }
                    if (kept > last) {
                        context.close();
                        return;
                    }
                    first = number(header, "next", -1);
                }
            }
        }
    }

    private static void handle(String header, ZMsg message, long last) throws InterruptedException {
        int rows = (int) number(header, "rows", 0);
        if (rows == 0) {
            return;
        }
        ByteBuffer ids = buffer(message);
        boolean whole = header.indexOf("\"columns\":[\"frames\"]") >= 0;
        ByteBuffer places = null;
        if (whole) {
            places = buffer(message); // of the messages, in the frames
        } else {
            buffer(message); // the topics: their validity, their offsets, themselves
            buffer(message);
            buffer(message);
        }
        ByteBuffer offsets = buffer(message);
        byte[] data = message.pop().getData();
        for (int i = 0; i < rows; i++) {
            long id = ids.getLong(8 * i);
            if (id > last) {
                return;
            }
            int frame = whole ? places.getInt(4 * (i + 1)) - 1 : i; // the last one is the value
            int begin = offsets.getInt(4 * frame);
            int end = offsets.getInt(4 * (frame + 1));
            String body = new String(data, begin, end - begin, StandardCharsets.UTF_8);
            if (!body.equals(Long.toString(id))) {
                throw new IllegalStateException("id " + id + " has the value " + body);
            }
            say("got " + id);
            Thread.sleep(1); // so that there is a middle to be killed in
        }
    }

    private static ByteBuffer buffer(ZMsg message) {
        return ByteBuffer.wrap(message.pop().getData()).order(ByteOrder.LITTLE_ENDIAN);
    }

    private static void send(ZMQ.Socket socket, char kind, String header) {
        ZMsg message = new ZMsg();
        message.add(new byte[] {'Z', 'D', 'S', 2, (byte) kind});
        message.add(header.getBytes(StandardCharsets.UTF_8));
        message.send(socket);
    }

    /** A number of a JSON object that has no others in it. */
    private static long number(String header, String field, long otherwise) {
        Matcher matcher = Pattern.compile("\"" + field + "\":([0-9]+)").matcher(header);
        return matcher.find() ? Long.parseLong(matcher.group(1)) : otherwise;
    }

    private static void say(String line) {
        System.out.println(line);
        System.out.flush();
    }
}
